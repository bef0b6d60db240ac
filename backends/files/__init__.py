"""Files that Keras writes and reads, under a distribution: written once, whole, and as for one device.

shared_files    all processes call, process 0 writes, and all raise its error
whole_files     writes beside the name first, then renames
weights_files   reads a large weight by slices
exporting       exports a model with gathered weights
backups         adds random states to `BackupAndRestore`
"""
