/* The steps of sandyard-launch. Each returns only if it worked. */
#ifndef SANDYARD_LAUNCH_H
#define SANDYARD_LAUNCH_H

_Noreturn void fail(const char *step, const char *what);

void clone_image(const char *from, const char *to);
void mount_image(const char *image, const char *where);
void write_new(const char *path, const char *owner, const char *text);
void mount_layer(const char *layer, const char *where);
void add_lower(const char *layer);
void add_layer(const char *layer, const char *where);
void renew_work(const char *work);
void mount_overlay(const char *upper, const char *work, const char *where);

/* The createRuntime hook of an engine: bound what a sandbox's users may take of the host's, and give
 * it a boot id of its own. */
int finish_sandbox(const char *instances, const char *watches, const char *boot_id, const char *rootfs);

#endif
