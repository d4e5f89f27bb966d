"""The packages that projects ask for, installed beside those of this machine."""
