"""What calls cost: accounts of calls and bytes."""
