"""Other packages' interfaces, answered by Headway's own counts and clock."""
