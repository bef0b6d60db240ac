"""`keras-flow compare`: trains one program on several backends and layouts, with the same weights and samples.

`runner` starts a process for each backend (`worker`), which trains each layout on batches in one order (`order`) and
writes files; `runner` compares these (`deviations`) into a `Comparison` (`result`), shown by `table` and `html`.
"""
