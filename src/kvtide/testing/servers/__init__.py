"""Real servers for tests and benchmarks: started on loopback, ended by pid."""
