/* Users and groups of the sandbox, read from its own files without any C library service. */
#ifndef SANDYARD_USERS_H
#define SANDYARD_USERS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum { GROUPS_MAX = 1024 };

struct user {
	uint32_t uid, gid;
	bool group_given; /* "user:group": no supplementary groups */
	char name[256], home[1024], shell[1024];
};

/* SPEC is a name, a uid, either with ":group"; "" is root. A number need not be in the file. -1: no such user. */
int user_find(const char *spec, struct user *user);
/* Supplementary groups with the primary one first; returns how many. */
int user_groups(const struct user *user, gid_t groups[GROUPS_MAX]);
/* The name of a uid or gid, or its number. */
void user_name(uint32_t uid, char *out, size_t size);
void group_name(uint32_t gid, char *out, size_t size);

#endif
