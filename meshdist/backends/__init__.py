"""The backends: `base` says what one is, `registry` knows them by name."""
