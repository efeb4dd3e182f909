"""What a run looks like, for all that show it: the volunteer's screen, `status`, `runs`, the dashboard, trackers."""
