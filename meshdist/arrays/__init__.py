"""Arrays of any library as blocks of memory, and the reductions over them."""
