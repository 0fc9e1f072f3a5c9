// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"net/url"
	"strings"
)

// layout names the keys. The package comment lists them.
type layout struct {
	root string // ends in a slash
}

func newLayout(prefix string) layout { return layout{prefix + "/v1/"} }

func (l layout) roster() string            { return l.root + "roster" }
func (l layout) member(name string) string { return l.root + "member/" + url.PathEscape(name) }
func (l layout) state(scope string) string { return l.scope(scope) + "state" }
func (l layout) probe(scope string) string { return l.scope(scope) + "probe" }
func (l layout) last(scope string) string  { return l.scope(scope) + "last" }

func (l layout) vote(scope, name string) string {
	return l.scope(scope) + "vote/" + url.PathEscape(name)
}

func (l layout) scope(scope string) string { return l.root + "scope/" + url.PathEscape(scope) + "/" }

type keyKind uint8

const (
	keyOther keyKind = iota
	keyRoster
	keyMember
	keyState
	keyVote
	keyProbe
	keyLast
)

// parse returns the kind of a key, and the scope and the process in it.
func (l layout) parse(key string) (kind keyKind, scope, name string) {
	rest, ok := strings.CutPrefix(key, l.root)
	if !ok {
		return keyOther, "", ""
	}
	part := strings.Split(rest, "/")
	text := func(i, most int) string {
		s, err := url.PathUnescape(part[i])
		if err != nil || s == "" || len(s) > most {
			return ""
		}
		return s
	}
	switch {
	case len(part) == 1 && part[0] == "roster":
		return keyRoster, "", ""
	case len(part) == 2 && part[0] == "member":
		if name = text(1, maxName); name != "" {
			return keyMember, "", name
		}
	case len(part) >= 3 && part[0] == "scope":
		if scope = text(1, maxScope); scope == "" {
			break
		}
		switch {
		case len(part) == 3 && part[2] == "state":
			return keyState, scope, ""
		case len(part) == 3 && part[2] == "probe":
			return keyProbe, scope, ""
		case len(part) == 3 && part[2] == "last":
			return keyLast, scope, ""
		case len(part) == 4 && part[2] == "vote":
			if name = text(3, maxName); name != "" {
				return keyVote, scope, name
			}
		}
	}
	return keyOther, "", ""
}
