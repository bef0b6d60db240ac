"""`kf.trace`: what ran when on which rank, as a file for Perfetto or chrome://tracing."""
