/* Work on whole trees. Runs in a helper child: it may block and take its time. */
#ifndef SANDYARD_WALK_H
#define SANDYARD_WALK_H

#include "helper.h"
#include "path.h"

struct list_request {
	const char *path;
	uint32_t depth;
};

struct move_request {
	const char *from, *to;
};

/* `walk_remove` takes the path itself. */
helper_work walk_list, walk_remove, walk_move;
/* Remove NAME in DIR and all below it, following no link. 0 or an errno; a missing NAME is no error. */
int remove_tree(int dir, const char *name);

#endif
