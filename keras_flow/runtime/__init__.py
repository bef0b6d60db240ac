"""Ranks and processes of the job: `kf.init` starts them, `kf.env` counts them, `kf.placement` names them."""
