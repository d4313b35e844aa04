"""What the actors say to each other: frozen structs, tagged unions, and their form on the wire.

Nothing in this package imports anything else of Penstock, and nothing in it does I/O.
"""
