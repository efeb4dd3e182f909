"""Who is there, who reaches whom, who can be relied on, and who leads. Takes what heartbeats and links say."""
