"""Direct connections between pairs of peers: TLS over TCP, for bulk data and, where there is one, for messages.

`links.py` has the table of all links; `link.py` one pair's connections; `dialling.py`, `introductions.py` and
`splicing.py` the ways to get one, from best to worst.
"""
