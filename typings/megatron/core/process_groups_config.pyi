from torch.distributed import ProcessGroup

class ProcessGroupCollection:
    cp: ProcessGroup
    ep: ProcessGroup
    expt_tp: ProcessGroup
    expt_dp: ProcessGroup
