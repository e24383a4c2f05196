/* The operations a host can ask for. Each answers by itself, now or later; R is only valid during the call. */
#ifndef SANDYARD_OPS_H
#define SANDYARD_OPS_H

#include "link.h"

#include <stdlib.h>

void op_dispatch(uint8_t op, uint32_t id, struct reader *r);

typedef void op_fn(uint32_t id, struct reader *r);

op_fn op_spawn, op_processes, op_attach, op_signal, op_resize;       /* proc.c, spawn.c */
op_fn op_stat, op_mkdir, op_move, op_list, op_remove;                /* files.c */
op_fn op_read, op_write, op_store;                                   /* transfer.c */
op_fn op_connect;                                                    /* port.c */
op_fn op_watch;                                                      /* watch.c */

#endif
