"""The dashboard: web pages that show runs, served by a bootstrap node, a follower or a volunteer.

Other rooms import:
server: bind, dashboard, serve_all_runs, url_of
watching: Source, follower_source, volunteer_source
"""
