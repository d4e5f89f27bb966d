"""trainbus: training runs that start, survive and finish. What a user's code imports."""
