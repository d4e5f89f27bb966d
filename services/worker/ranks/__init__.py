"""What running ranks write and report: journal, ring, control socket, stalls."""
