"""What more memory would bring: ghosts of other sizes in a server, and their findings in words."""
