"""Moving bytes between device blocks and the host pool; never imports vLLM."""
