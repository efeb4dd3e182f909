"""What an organiser or a volunteer decides by: checks of a machine, plans of a run, and a demo."""
