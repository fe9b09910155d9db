"""Start the ranks of a job: `meshrun` from the shell, `spawn` from Python."""
