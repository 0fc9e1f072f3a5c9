// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
	"github.com/stormguard-mq/stormguard/internal/scope"
)

var someone = crdt.Replica{Name: "orders-1", Incarnation: 1 << 63}

func samples() map[keyKind][]byte {
	at := scope.Position{Gen: 3, Round: 300}
	vote := scope.Vote{
		Scope: "g/orders", Node: someone, Version: 1, Phase: scope.PhasePassed, At: at, Wants: true,
		Passes: 2, Failed: 7, BackoffLevel: 4, OpenFor: 800 * time.Millisecond, Cause: "timeout",
	}
	last := vote
	last.Wants, last.At.Round, last.Passes, last.Failed = false, 0, 0, 0
	return map[keyKind][]byte{
		keyRoster: settings{7, 5e5, 10, 1 << 60}.encode(),
		keyMember: encodeMember(someone.Incarnation),
		keyState:  encodeState(scope.State{Position: at, BackoffLevel: 9, OpenFor: 25600 * time.Millisecond, Cause: "storm"}),
		keyVote:   encodeVote(vote),
		keyProbe:  probe{someone, at}.encode(),
		keyLast:   encodeLast(last),
	}
}

// again decodes b and encodes what it read.
func again(kind keyKind, b []byte) ([]byte, error) {
	switch kind {
	case keyRoster:
		v, err := decodeSettings(b)
		return v.encode(), err
	case keyMember:
		v, err := decodeMember(b)
		return encodeMember(v), err
	case keyState:
		v, err := decodeState(b)
		return encodeState(v), err
	case keyVote:
		v, err := decodeVote(b, "g/orders", someone.Name)
		return encodeVote(v), err
	case keyProbe:
		v, err := decodeProbe(b)
		return v.encode(), err
	default:
		v, err := decodeLast(b, "g/orders")
		return encodeLast(v), err
	}
}

func TestValues(t *testing.T) {
	for kind, b := range samples() {
		got, err := again(kind, b)
		if err != nil || !bytes.Equal(got, b) {
			t.Errorf("kind %d: %x became %x, %v", kind, b, got, err)
		}
		if len(b) > 64 {
			t.Errorf("kind %d takes %d bytes", kind, len(b))
		}
		for i := range b {
			if _, err := again(kind, b[:i]); err == nil {
				t.Errorf("kind %d: the first %d of %d bytes are read as all", kind, i, len(b))
			}
		}
		for _, bad := range [][]byte{append(bytes.Clone(b), 0), append([]byte{2}, b[1:]...)} {
			if _, err := again(kind, bad); err == nil {
				t.Errorf("kind %d: %x is read", kind, bad)
			}
		}
	}
}

func FuzzValue(f *testing.F) {
	for kind, b := range samples() {
		f.Add(byte(kind)-1, b)
	}
	f.Fuzz(func(t *testing.T, kind byte, b []byte) {
		k := keyKind(kind%byte(keyLast)) + 1
		once, err := again(k, b)
		if err != nil {
			return
		}
		twice, err := again(k, once)
		if err != nil || !bytes.Equal(once, twice) || len(once) > len(b) {
			t.Fatalf("kind %d: %x, %x, %x, %v", k, b, once, twice, err)
		}
	})
}

func FuzzKey(f *testing.F) {
	f.Add("/stormguard", "g/orders/7", "orders-1", "/stormguard/v1/scope/%zz/state")
	f.Add("", "%2F", "ä/../b c", "/v1/member/")
	f.Fuzz(func(t *testing.T, prefix, scope, name, junk string) {
		l := newLayout(prefix)
		if kind, s, n := l.parse(junk); kind != keyOther && strings.Count(junk, "/") > strings.Count(prefix, "/")+5 {
			t.Errorf("%q is %d of %q, %q", junk, kind, s, n)
		}
		if scope == "" || name == "" || len(scope) > maxScope || len(name) > maxName {
			return
		}
		for key, want := range map[string]keyKind{
			l.roster(): keyRoster, l.member(name): keyMember, l.state(scope): keyState, l.vote(scope, name): keyVote,
			l.probe(scope): keyProbe, l.last(scope): keyLast,
		} {
			kind, s, n := l.parse(key)
			if kind != want || s != "" && s != scope || n != "" && n != name {
				t.Errorf("%q is %d of %q, %q, want %d", key, kind, s, n, want)
			}
		}
	})
}
