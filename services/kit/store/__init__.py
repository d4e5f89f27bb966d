"""The object store (S3): one client for objects, one reader for bulk transfers, one set of errors."""
