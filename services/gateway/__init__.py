"""HTTP and server-sent events in front of the bus, and the SQL read model behind them."""
