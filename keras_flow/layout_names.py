"""The names that the commands have for layouts, in words. `user_file.distribution_maker` reads them."""

#: dp4: rows over 4 ranks; tp4: variables; 2x2: both; pp2: stages of a pipeline, each of them dp or tp too
LAYOUTS = (
    "dpN, tpN, AxB, ppN, ppNxdpM, ppNxtpM, ppNxdpMxtpK, dpNz1 or AxBz3 (zero=1 to 3), "
    "dpNr, AxBz3r or ppNr (activations are computed again)"
)
