"""The site of the documentation: the pages of ``docs/``, and a reference that is generated from the code."""
