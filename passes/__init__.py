"""Graph rewrites, one per file; each opens with a small graph before and after."""
