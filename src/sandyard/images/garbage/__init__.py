"""What the store holds: what may go, what is damaged, what nobody knows."""
