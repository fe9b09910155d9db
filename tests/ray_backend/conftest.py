# They import Ray; pytest would import it for its doctests, of which there are none.
collect_ignore = ["clusters_of_drivers.py", "job_driver.py", "ray_driver.py", "train_driver.py", "two_nodes_driver.py"]
