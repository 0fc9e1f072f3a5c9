// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package console

import (
	"testing"
	"time"
)

// Of two sources with one cause the last dead letter is the later one, whichever began first.
func TestLastOfACause(t *testing.T) {
	begin := time.Now()
	e := events{all: []*Event{
		{At: begin, Until: begin.Add(time.Minute), Kind: EventDead, Subject: "a", Count: 3, Cause: "v2:1"},
		{At: begin.Add(time.Second), Until: begin.Add(time.Second), Kind: EventDead, Subject: "b", Count: 1, Cause: "v2:1"},
	}}
	all := e.causes(begin)
	if len(all) != 1 || all[0].Count != 4 || !all[0].First.Equal(begin) || !all[0].Last.Equal(begin.Add(time.Minute)) {
		t.Errorf("%+v", all)
	}
}
