"""Commands for people, each a thin command line over the rooms: `python -m tools.NAME --help`. Nothing imports them."""
