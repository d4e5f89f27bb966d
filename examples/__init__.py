"""Examples. The demo is a package of its own; the other folders are projects that are submitted as they are."""
