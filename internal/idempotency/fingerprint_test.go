package idempotency

import (
	"encoding/hex"
	"errors"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// fingerprintSample is a payment with every kind of field. Each call returns one of its own, to be changed at will.
func fingerprintSample() Request {
	return Request{
		Method: "POST",
		Route:  "/v1/payments/{id}/refunds",
		Params: []string{"0198c2f0-7f3e-7c1a-9a53-5f0f5f2b1c11"},
		Fields: []Field{
			{"amount", "1000"},
			{"currency", "EUR"},
			{"reason", "größe"},
			{"metadata", MapValue(map[string]string{"b": "2", "a": "1"})},
		},
	}
}

func TestFingerprint(t *testing.T) {
	t.Parallel()

	sample, err := Fingerprint(1, fingerprintSample())
	require.NoError(t, err)

	t.Run("RecipeOneIsFixedForEver", func(t *testing.T) {
		t.Parallel()
		// If this fails, recipe 1 has changed, and every repeat of a key that is already stored would be answered 422. Put the
		// change into a recipe of its own.
		require.Equal(t,
			"1:14:POST25:/v1/payments/{id}/refunds1:136:0198c2f0-7f3e-7c1a-9a53-5f0f5f2b1c11"+
				"1:46:amount4:10008:currency3:EUR6:reason7:größe8:metadata12:1:a1:11:b1:2", string(recipe1(fingerprintSample())))
		require.Equal(t, "c524fafd62e290f1479b5dbb3490f837654805f5930499f85a891cc8200f7ba2", hex.EncodeToString(sample))
	})
	t.Run("NewKeysAreFingerprintedByRecipeOne", func(t *testing.T) {
		t.Parallel()
		require.EqualValues(t, 1, CurrentRecipe)
		require.Contains(t, recipes, CurrentRecipe)
	})
	t.Run("AnUnknownRecipeIsAnErrorOfItsOwn", func(t *testing.T) {
		t.Parallel()
		for _, version := range []int16{-1, 0, CurrentRecipe + 1} {
			sum, err := Fingerprint(version, fingerprintSample())
			require.ErrorIs(t, err, ErrRecipeUnknown)
			require.Nil(t, sum)
		}
	})
	t.Run("OldRowsAreComparedByTheirOwnRecipe", func(t *testing.T) {
		t.Parallel()
		later := map[int16]recipe{1: recipe1, 2: func(r Request) []byte { return append([]byte("2"), recipe1(r)...) }}
		old, err := fingerprintFrom(later, 1, fingerprintSample())
		require.NoError(t, err)
		require.Equal(t, sample, old)

		current, err := fingerprintFrom(later, 2, fingerprintSample())
		require.NoError(t, err)
		require.NotEqual(t, sample, current)
	})
	t.Run("NilAndEmptyListsAreTheSame", func(t *testing.T) {
		t.Parallel()
		require.Equal(t, recipe1(Request{Method: "POST", Route: "/v1/orders"}),
			recipe1(Request{Method: "POST", Route: "/v1/orders", Params: []string{}, Fields: []Field{}}))
	})

	for _, tt := range []struct {
		fact   string
		change func(*Request)
	}{
		{"AnotherMethodIsADifference", func(r *Request) { r.Method = "PUT" }},
		{"AnotherRouteIsADifference", func(r *Request) { r.Route = "/v1/orders" }},
		{"AnotherParameterIsADifference", func(r *Request) { r.Params[0] = "0198c2f0-7f3e-7c1a-9a53-5f0f5f2b1c12" }},
		{"AMissingParameterIsADifference", func(r *Request) { r.Params = nil }},
		{"AnotherValueIsADifference", func(r *Request) { r.Fields[0].Value = "1001" }},
		{"AnotherNameIsADifference", func(r *Request) { r.Fields[0].Name = "amounts" }},
		{"AFieldMoreIsADifference", func(r *Request) { r.Fields = append(r.Fields, Field{"capture", "true"}) }},
		{"AnEmptyFieldMoreIsADifference", func(r *Request) { r.Fields = append(r.Fields, Field{"capture", ""}) }},
		{"AFieldLessIsADifference", func(r *Request) { r.Fields = r.Fields[:3] }},
		{"AnotherOrderOfFieldsIsADifference", func(r *Request) { slices.Reverse(r.Fields) }},
		{"CaseIsADifference", func(r *Request) { r.Fields[1].Value = "eur" }},
		{"AnotherUnicodeFormOfTheSameTextIsADifference", func(r *Request) { r.Fields[2].Value = "gro\u0308\u00dfe" }},
		{"ACharacterMovedToTheNextValueIsADifference", func(r *Request) { r.Fields[0].Value, r.Fields[1].Value = "100", "0EUR" }},
	} {
		t.Run(tt.fact, func(t *testing.T) {
			t.Parallel()
			changed := fingerprintSample()
			tt.change(&changed)
			sum, err := Fingerprint(1, changed)
			require.NoError(t, err)
			require.NotEqual(t, sample, sum)
		})
	}
}

// fingerprintText draws from few characters, those with a meaning in the encoding among them, so that a careless encoding would
// soon collide. It is made anew for each draw, since a generator keeps notes of its own and parallel tests would race for them.
func fingerprintText() *rapid.Generator[string] {
	return rapid.StringOfN(rapid.RuneFrom([]rune("01:a")), 0, 5, -1)
}

func fingerprintRequest() *rapid.Generator[Request] {
	text := fingerprintText()
	field := rapid.Custom(func(t *rapid.T) Field {
		return Field{text.Draw(t, "name"), text.Draw(t, "value")}
	})
	return rapid.Custom(func(t *rapid.T) Request {
		return Request{
			Method: text.Draw(t, "method"),
			Route:  text.Draw(t, "route"),
			Params: rapid.SliceOfN(text, 0, 3).Draw(t, "params"),
			Fields: rapid.SliceOfN(field, 0, 3).Draw(t, "fields"),
		}
	})
}

func TestFingerprintEncoding(t *testing.T) {
	t.Parallel()

	t.Run("CanBeReadBackSoNoTwoRequestsShareOne", func(t *testing.T) {
		t.Parallel()
		rapid.Check(t, func(t *rapid.T) {
			r := fingerprintRequest().Draw(t, "request")
			back, err := decodeRecipe1(string(recipe1(r)))
			if err != nil || !sameRequest(r, back) {
				t.Fatalf("%+v came back as %+v, %v", r, back, err)
			}
		})
	})
	t.Run("DiffersForDifferentRequests", func(t *testing.T) {
		t.Parallel()
		rapid.Check(t, func(t *rapid.T) {
			a, b := fingerprintRequest().Draw(t, "a"), fingerprintRequest().Draw(t, "b")
			if sameRequest(a, b) != (string(recipe1(a)) == string(recipe1(b))) {
				t.Fatalf("%+v and %+v", a, b)
			}
		})
	})
}

func TestMapValue(t *testing.T) {
	t.Parallel()

	t.Run("IsSortedByName", func(t *testing.T) {
		t.Parallel()
		require.Equal(t, "1:a1:12:aa0:1:b3:2:c", MapValue(map[string]string{"b": "2:c", "aa": "", "a": "1"}))
	})
	t.Run("IsEmptyForNoNames", func(t *testing.T) {
		t.Parallel()
		require.Empty(t, MapValue(nil))
		require.Empty(t, MapValue(map[string]string{}))
	})
	t.Run("DoesNotDependOnOrder", func(t *testing.T) {
		t.Parallel()
		rapid.Check(t, func(t *rapid.T) {
			m := rapid.MapOfN(fingerprintText(), fingerprintText(), 0, 8).Draw(t, "map")
			names := make([]string, 0, len(m))
			for name := range m {
				names = append(names, name)
			}
			other := make(map[string]string)
			for _, name := range rapid.Permutation(names).Draw(t, "order") {
				other[name] = m[name]
			}
			if MapValue(m) != MapValue(other) {
				t.Fatalf("%v", m)
			}
		})
	})
	t.Run("DiffersForDifferentMaps", func(t *testing.T) {
		t.Parallel()
		rapid.Check(t, func(t *rapid.T) {
			m := rapid.MapOfN(fingerprintText(), fingerprintText(), 0, 4).Draw(t, "map")
			rest, back := MapValue(m), map[string]string{}
			for rest != "" {
				var name, value string
				var err error
				if name, rest, err = cutNetstring(rest); err != nil {
					t.Fatal(err)
				}
				if value, rest, err = cutNetstring(rest); err != nil {
					t.Fatal(err)
				}
				back[name] = value
			}
			if len(back) != len(m) {
				t.Fatalf("%v came back as %v", m, back)
			}
			for name, value := range m {
				if got, ok := back[name]; !ok || got != value {
					t.Fatalf("%v came back as %v", m, back)
				}
			}
		})
	})
}

func sameRequest(a, b Request) bool {
	return a.Method == b.Method && a.Route == b.Route && slices.Equal(a.Params, b.Params) && slices.Equal(a.Fields, b.Fields)
}

// decodeRecipe1 reads recipe 1 back. Only a test needs to: that it can be done at all proves that the encoding loses nothing.
func decodeRecipe1(s string) (r Request, err error) {
	next := func() (item string) {
		if err == nil {
			item, s, err = cutNetstring(s)
		}
		return item
	}
	count := func() int {
		n, atoiErr := strconv.Atoi(next())
		err = errors.Join(err, atoiErr)
		return n
	}
	if version := next(); version != "1" {
		return r, errors.New("not recipe 1")
	}
	r.Method, r.Route = next(), next()
	for range count() {
		r.Params = append(r.Params, next())
	}
	for range count() {
		r.Fields = append(r.Fields, Field{next(), next()})
	}
	if s != "" {
		err = errors.Join(err, errors.New("something is left over"))
	}
	return r, err
}

func cutNetstring(s string) (item, rest string, err error) {
	length, rest, found := strings.Cut(s, ":")
	n, err := strconv.Atoi(length)
	if !found || err != nil || n < 0 || n > len(rest) {
		return "", "", errors.New("not a netstring")
	}
	return rest[:n], rest[n:], nil
}
