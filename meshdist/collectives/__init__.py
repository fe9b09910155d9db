"""The collectives: a file for each, `definition` for what they have in common, `methods` for the list of them."""
