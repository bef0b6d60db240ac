"""A job in several processes that runs every collective: `job.py GROUPS [short]`, a JSON list of groups of ranks."""

import json
import sys

import keras_flow as kf

if __name__ == "__main__":
    kf.init()
    from tests.comm import cases

    checked = cases.everything(json.loads(sys.argv[1]), is_short=len(sys.argv) > 2)
    kf.comm.barrier()  # processes end together: one that is done does not wait long for the others
    if kf.env.is_main_process():
        print(json.dumps({"world": kf.env.get_world_size(), "processes": kf.env.process_count(), "groups": checked}))
