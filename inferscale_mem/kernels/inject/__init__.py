"""Inject: rows of records, keys rotated to their positions, into blocks of a paged cache."""
