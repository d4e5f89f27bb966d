"""What every service is made of: bus, leases, jobs, objects, settings, telemetry, health."""
