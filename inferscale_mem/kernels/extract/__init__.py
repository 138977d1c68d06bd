"""Extract: tokens out of a paged cache into rows of records, the rotation of their keys undone."""
