# They import Ray; pytest would import it for its doctests, of which there are none.
collect_ignore = ["ray_driver.py"]
