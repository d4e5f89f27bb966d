"""The revisions of the read model, one a module. A table that is made is made ``if_not_exists``."""
