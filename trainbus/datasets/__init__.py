"""Views of datasets: lineage, verification, differences. Pure."""
