"""The collectives: one file each; `definition` is their common base, `methods` the list of them."""
