"""What a node keeps on its disk: who needs it, whether it is whole, how much it is."""
