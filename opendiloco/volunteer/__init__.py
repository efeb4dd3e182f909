"""One machine as a volunteer: its session in a run, its admission, and the state that it follows or keeps."""
