"""A page that shows a run, served by whoever has something to show of it: a bootstrap node, a follower, a volunteer."""
