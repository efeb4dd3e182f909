"""A page that shows a run, served by whoever has something to show of it: a bootstrap node, a follower, a volunteer.

Other rooms import:
server: bind, dashboard, serve_all_runs, url_of
watching: Source, follower_source, volunteer_source
"""
