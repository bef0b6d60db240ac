"""`kf.DataParallel` and `kf.ModelParallel`: distributions as users create them, with `explain` and `verify`."""
