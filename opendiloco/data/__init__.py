"""What is read: documents, their tokens, and the order of the samples cut from them. Needs no torch."""
