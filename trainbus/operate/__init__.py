"""An operator's questions to the log: past decisions made again, policies and nodes compared, dead letters handled.

It is installed with the services and imports their pure parts. Only commands import it: no service, and no client.
"""
