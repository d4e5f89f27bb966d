"""Datasets as folders of plain files, for scripts: train/, val/ and test/."""
