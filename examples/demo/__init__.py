"""The demo: two competing trainings end to end, shown live and checked at the end."""
